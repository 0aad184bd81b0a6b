"""From parameters to sampler chains, and from sampled tokens to the text that may be shown. Pure."""
