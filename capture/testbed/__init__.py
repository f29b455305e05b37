"""A cluster on one machine: ranks in network namespaces behind limited links, trained, recorded, predicted and run."""
