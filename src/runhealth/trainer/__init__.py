"""A distributed trainer that is instrumented, can be made to fail on purpose, and obeys a rollback plan."""
