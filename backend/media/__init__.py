"""Files of images, sounds and videos, honest or hostile, to plain values."""
