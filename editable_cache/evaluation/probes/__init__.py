"""Where a model keeps its notes: causal probes of the study's section 3 and appendices C and D."""
