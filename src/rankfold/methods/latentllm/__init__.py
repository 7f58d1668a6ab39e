"""LatentLLM: latent linear layers, jointly where modules act jointly."""
