"""Advantages, losses and controllers as pure tensor functions."""
