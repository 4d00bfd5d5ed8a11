"""How many replicas the fleet needs, and why."""
