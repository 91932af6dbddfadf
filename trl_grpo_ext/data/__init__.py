"""Data sets from recipes, groups of rollouts."""
