"""Messages between processes: encoding, limits and framing, and the networks that carry them."""
