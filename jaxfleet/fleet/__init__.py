"""Jobs of several processes: who each is, and what a script calls."""
