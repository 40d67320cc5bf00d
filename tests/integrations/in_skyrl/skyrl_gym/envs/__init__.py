"""SkyRL's environments, of which its configuration names two."""
