"""Hostile arguments, and files that are not what was written. Every case is its kind and a seed."""
