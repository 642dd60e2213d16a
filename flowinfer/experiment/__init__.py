"""Two arms of one running service: who goes where, what came of it, and when arm B has to stop."""
