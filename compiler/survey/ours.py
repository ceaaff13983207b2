"""What our own capture makes of some calls."""
