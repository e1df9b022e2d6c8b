"""Episodes: environments, agent programs and what drives them, each in a process of its own."""
