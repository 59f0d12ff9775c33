"""Device code. Importing it loads Triton."""
