"""The self-test that every rank of scripts/test_distributed.sh runs."""
