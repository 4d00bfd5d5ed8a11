"""Attention over the paged cache, behind transformers' attention interface."""
