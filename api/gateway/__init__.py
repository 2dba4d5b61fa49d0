"""The gateway: carries invited machines' connections to the broker over WebSockets."""
