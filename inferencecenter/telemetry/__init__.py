"""What the daemon tells about itself."""
