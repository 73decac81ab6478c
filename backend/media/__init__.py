"""Files of pictures, sounds and films, honest or hostile, to plain values."""
