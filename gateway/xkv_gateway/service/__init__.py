"""What listens: the control port and the admin port."""
