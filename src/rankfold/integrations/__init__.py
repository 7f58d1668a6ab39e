"""What makes other programs run compressed checkpoints; each file imports the program it is for."""
