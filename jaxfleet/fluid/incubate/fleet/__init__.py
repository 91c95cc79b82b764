"""Jobs by one object, the fleet."""
