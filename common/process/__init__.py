"""How processes begin and end."""
