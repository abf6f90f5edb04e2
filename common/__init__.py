"""Shared code of the recipes: arguments, launching, sharding, data, the training loop, evaluation and export."""
