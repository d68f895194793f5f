"""The command line ``editable-cache``. Nothing here imports torch before a command runs."""
