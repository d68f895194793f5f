"""Everything that runs the model: precompile, append, recompute, edit, verify."""
