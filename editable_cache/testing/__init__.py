"""Public test kit: tiny models, two small pretrained ones, oracles, tolerances. Nothing of the package imports it."""
