"""What fleets use besides."""
