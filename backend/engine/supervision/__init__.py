"""The engine process as the server holds it: started, fed, watched and replaced."""
