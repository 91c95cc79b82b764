"""What passes ask about a program: labels, optimize groups, fingerprints."""
