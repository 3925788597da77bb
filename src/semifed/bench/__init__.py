"""`semifed bench`: what a round costs on this machine, beside what it would cost at best and what others take."""
