"""Parameter servers: the server, and the trainers' side of the protocol in `transport`."""
