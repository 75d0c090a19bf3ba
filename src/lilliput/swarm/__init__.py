"""What peers announce and how they are found."""
