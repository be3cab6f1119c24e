// Before the first paint: the theme that was chosen here, if one was.
try {
  const theme = sessionStorage.getItem("theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch { /* a browser without storage has the system's theme */ }
