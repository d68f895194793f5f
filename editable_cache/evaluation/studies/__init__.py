"""What is measured: each study takes a model and items and adds rows to a run."""
