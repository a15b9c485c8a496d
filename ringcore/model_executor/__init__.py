"""Models, their layers and their weights; it does not know what is scheduled or why."""
