"""Model files: which there are and by what names, what is known of them, and where they come from."""
