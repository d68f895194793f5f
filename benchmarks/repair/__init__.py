"""The instrument of repair: contaminated caches of real documents, and how near a repair brings them to clean ones."""
