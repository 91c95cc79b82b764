"""Jobs with parameter servers."""
