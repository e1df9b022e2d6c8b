"""Where the rollouts of policy optimisation come from: sampled, scored, and kept until they are trained on."""
