"""``python -m sparse_attn quality``: what a selection costs a model, and the smallest share within a loss budget."""
