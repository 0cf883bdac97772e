"""How much a pair counts: weightings, and how VNet is learned."""
