"""The engine process, seen from the server: started, fed, watched and replaced."""
