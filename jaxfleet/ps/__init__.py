"""Parameter servers: messages, networks, the server and the trainers' client."""
