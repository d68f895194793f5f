"""Chunks and caches as files: safetensors and JSON, never pickle."""
