"""Growing text: finds markers, and trims the whitespace around them."""
