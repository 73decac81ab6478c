"""From protobuf messages to the backend's own values."""
