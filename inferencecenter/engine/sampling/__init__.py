"""From parameters to sampler chains, and from sampled tokens to releasable text. Pure."""
