"""Instead of editing a cache: change the weights, by ROME or by fine-tuning a LoRA, and put them back."""
