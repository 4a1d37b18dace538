"""EAGLE-3 (arXiv 2503.01840): one decoder layer that reads fused target features and the next token."""
