"""gRPC in and out: each servicer turns messages into service calls and errors into statuses, nothing more."""
