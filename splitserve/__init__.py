"""The core of splitserve: decides, never does. Standard library only, no clock, no sockets."""
