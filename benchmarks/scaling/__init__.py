"""Load alone takes a service from no replica to eight and back: the timeline, and every request counted."""
