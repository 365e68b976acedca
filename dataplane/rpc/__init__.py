"""The wires. Protobuf never leaves this room."""
